"""Predicts what a training step costs, by arithmetic: a plan for 32,768 GPUs needs no GPU.

from_settings    a job from the command line or a launch file: the model (dense, shapes), the machine, the batch
search           every legal grid, ranked; settings: those that a grid may choose
candidate        a job on a grid: its step, memory, traffic and computation, each computed once
predict          seconds of a candidate; pipelined and stages: of one with a pipeline
traffic          bytes and calls of every collective
time             seconds: of products, of collectives, and of what overlaps leave of them
"""
