"""Data: one form for batches (`batches`, `checks`, `loaders`) and data opened by name (`sources`)."""
