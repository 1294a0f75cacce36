"""The only code that knows module types: calls of modules become canonical tensors.

`registry` finds the rule of a module, `inventory` assigns every parameter to a block, `recorder` runs the model and
records its layers, `verification` compares each rule with autograd on a few examples. Each file in `rules` covers one
kind of module.
"""
