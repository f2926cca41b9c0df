"""The demo: a real language model on Wikipedia articles, with the ordinary loss and with the goldfish loss."""
