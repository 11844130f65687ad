from explorer import frame
frame.open_page("export")
