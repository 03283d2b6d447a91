"""Making draft heads for speculative decoding: data, features of the target, the head, its loop.

`sample` and `self_text` make text, `target_states` what the target model thinks of it,
`draft_module` is the head as torch trains it, `draft_trainer` the loop, `draft_checkpoint` the
published layout. Needs torch; nothing that serves imports this room.
"""
