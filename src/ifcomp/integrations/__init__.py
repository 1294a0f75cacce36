"""Good neighbours: the packages that people use already, one file each. Import what you need from its own file."""
