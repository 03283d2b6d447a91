"""Architectures, each written once over the op set. Calls no array library itself."""
