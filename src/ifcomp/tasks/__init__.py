"""Tasks on score tables and arrays: label audits, OOD detection, calibration and pruning. No model is needed."""
