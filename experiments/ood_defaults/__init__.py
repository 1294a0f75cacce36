"""Study behind the default score of OOD inputs."""
