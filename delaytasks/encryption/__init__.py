"""Encryption of bodies and results at rest. Imported only if encryption keys are set."""
