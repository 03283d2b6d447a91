"""Responses that a client can come back to, of every account, bounded by count, size and age."""
