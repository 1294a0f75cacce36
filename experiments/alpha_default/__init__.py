"""Default alpha of predictions: NLL on clean and shifted data over the added probability."""
