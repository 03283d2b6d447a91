"""Models as files: what is read from disk, and nothing computed from it.

`checkpoint` opens a folder or a GGUF file and is what other rooms call; `model_store` turns a name
into a path, pulling an alias (`aliases`, `pip_download`, `file_lock`, `env`). Configuration:
`model_config` from `hf_config` or `gguf_config`, both over `fields` and `rope_config`. Weights:
`tensors` from `safetensors_source` or `gguf_source` (over `gguf_file`), valued by `block_formats`,
checked by `tensor_layout`. Text: `tokenizer` from `tokenizer_files` or `gguf_tokenizer`, bytes by
`vocabulary_bytes`; `chat_template` in a `template_sandbox` with `template_limits`. No torch.
"""
