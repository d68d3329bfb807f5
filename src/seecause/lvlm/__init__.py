"""Which heads carry the picture into the words of a vision-language model (head attribution)."""
