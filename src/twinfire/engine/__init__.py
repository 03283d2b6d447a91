"""Token ids in, token ids out.

`runner` is the interface to a model on a device, `inputs` packs a step plan for it, `sampler`
draws tokens, `engine` is the step loop that joins scheduler, runner and sampler. Knows no text and
no sockets.
"""
