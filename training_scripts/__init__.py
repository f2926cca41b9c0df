"""The scripts: fine-tuning, launch files, batch scripts for Slurm, a demo, and a study of memorization."""
