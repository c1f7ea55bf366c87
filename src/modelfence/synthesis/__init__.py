"""Images without data: generators, drawn content and random styles."""
