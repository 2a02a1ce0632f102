"""Manta: everything between a research question and its answer, on Hydra, Ray Train and Ray Tune."""
