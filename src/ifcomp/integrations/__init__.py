"""Adapters for other packages, one module per package. Import the module of the package that you use."""
