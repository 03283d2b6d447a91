"""Models whose engines are vLLM or SGLang servers: HTTP in, HTTP out, both legs shaped here."""
