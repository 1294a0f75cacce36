"""Evidence of the inner layers about labels: features, leave-one-out predictors and their pool."""
