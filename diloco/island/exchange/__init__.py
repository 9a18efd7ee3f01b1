"""A rank's exchange with the syncers: poll, contribute, stage, settle."""
