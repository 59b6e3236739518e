"""disco_client: the trainer's side of discod."""
