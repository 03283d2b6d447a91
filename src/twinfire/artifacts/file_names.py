"""Names by which the files of a model are told apart."""

CONFIG_FILE = "config.json"
GGUF_SUFFIX = ".gguf"
