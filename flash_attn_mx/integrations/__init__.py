"""How other libraries call flash_attn_mx: sdpa (torch's own attention functions), transformers (Hugging Face).

Each module is imported where it is used; the packages that it serves are no dependencies of this one.
"""
