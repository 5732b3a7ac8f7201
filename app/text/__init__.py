"""Text of answers: from tokens to text, up to the stop conditions."""
