"""Architectures, each written once over the op set. Calls no array library itself but numpy.

`registry` builds a model from a configuration and its weights, `decoder` is the one body that the
dense architectures share, `tensor_names` what their tensors are called and shaped, `rope` their
frequencies.
"""
