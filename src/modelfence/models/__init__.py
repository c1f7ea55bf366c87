"""Classifiers: zoo, loading, source-model training, logits."""
