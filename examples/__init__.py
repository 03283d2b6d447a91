"""One runnable program a client: `python -m examples.openai_python http://127.0.0.1:8000`."""
