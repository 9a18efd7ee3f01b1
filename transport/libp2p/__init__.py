"""Calls over libp2p, through the daemon that hivemind installs."""
