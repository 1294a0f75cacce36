"""Peak memory and time of the verbs with 100,000 and 1,000,000 examples."""
