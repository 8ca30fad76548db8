"""What is read from where: ranks, blocks, pieces, descriptors."""
