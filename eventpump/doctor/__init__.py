"""Examines everything between this machine and a running consumer or producer: what `eventpump doctor` does."""
