"""From text files to token shards: what `kamui-dist prepare` and `kamui-dist tokenizer` are made of. No torch."""
