"""What an island does between two rounds: model, data, optimizer, trainer."""
