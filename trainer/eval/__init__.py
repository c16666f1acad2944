"""Evaluation: how good the scores were that served before they were trained on."""
