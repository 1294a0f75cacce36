"""Data: one form for batches (`batches`, `checks`, `loaders`), the forms that users give (`forms`), named `sources`."""
