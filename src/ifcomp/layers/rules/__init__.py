"""One file per kind of module. All files in this folder are imported when a rule is first needed."""
