"""What is to be made: a recipe and its checks, the steps that follow from it, and what they cost."""
