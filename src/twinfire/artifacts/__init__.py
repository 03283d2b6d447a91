"""Models as files: what is read from disk, and nothing computed from it.

`model_config` is the one description of an architecture that the rest of the system reads;
`tensors` a named, mapped array; `checkpoint` opens a folder or a GGUF file and gives both, with
tokenizer, chat template and vocabulary bytes. Never imports torch.
"""
