"""The messages between processes, and the request and usage types that every room shares.

Imports nothing of ours. `sampling` says how tokens are drawn, `messages` what travels on a
gateway-worker link, `framing` how a message becomes bytes, `tokens` how token ids are packed,
`errors` which faults a user can cause.
"""
