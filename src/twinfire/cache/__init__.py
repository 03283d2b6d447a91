"""KV blocks by number and by content; never their bytes.

`kv_group` names the arrays that one block is made of, `block_hash` chains content hashes,
`block_pool` owns the blocks and their reference counts, `prefix_cache` finds computed prefixes.
"""
