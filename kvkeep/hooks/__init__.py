"""What servers and scripts call around a model's forward passes."""
