"""The zoo: small versions of public architectures, each compared with dense autograd gradients in float64."""
