"""Text and HTTP outside, token ids inside.

`app` assembles the application and `server` runs it; `endpoint` and `exchange` carry one HTTP
exchange, `gateway` is what all of them share. `dialects` speak the public APIs, `text` turns tokens
into text and back, `text_generation` drives a request, `backends` reach workers. Never imports
kernels, models, engine or torch, and runs nothing long on its event loop.
"""
