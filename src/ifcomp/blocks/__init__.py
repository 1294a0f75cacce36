"""The mathematics of a block: covariances, second moments, quadratic and bilinear forms on canonical tensors.

There are three kinds. A Kronecker block has inputs ``a`` and output gradients ``b`` at T shared positions, and the
per-example gradient ``sum_t b_t a_t^T``. An embedding block is a Kronecker block with one-hot inputs. A diagonal block
has its per-example gradient as a vector.

Nothing here depends on modules or on how canonical tensors are recorded.

Symbols of shapes: B examples of a microbatch (b of a slab), C cotangents, G groups, O outputs and J inputs per group (j
of a slab), T positions that share the weight, P parameters of a block, D width and V entries of an embedding.
"""
