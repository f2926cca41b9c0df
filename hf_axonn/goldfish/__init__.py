"""The goldfish loss: its mask, and the Trainers that use it."""
