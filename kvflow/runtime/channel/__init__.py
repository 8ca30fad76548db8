"""The side channel: it asks peers questions, answers the questions of peers, and reads the CURVE keys."""
