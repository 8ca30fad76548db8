"""The side channel: asks peers questions, answers questions from peers, and reads the CURVE key files."""
