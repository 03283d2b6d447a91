"""Text and HTTP outside, token ids inside.

`app` assembles the server, `dialects` speak the public APIs, `text` turns tokens into text and back,
`backends` reach workers. Never imports kernels, models, engine or torch, and runs nothing long on
its event loop.
"""
