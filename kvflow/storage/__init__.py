"""Part: the blocks of a prompt in files. `Runtime.save_blocks` writes them, `restore_blocks` reads them."""
