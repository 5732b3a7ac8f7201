"""HTTP endpoints in the form of Anthropic's Messages API."""
