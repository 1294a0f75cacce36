"""Label audits of networks that have memorised their labels, beside the methods that people use today."""
