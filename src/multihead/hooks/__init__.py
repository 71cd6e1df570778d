"""Make models of other libraries call this library's attention: install, convert each call and mask, restore."""
