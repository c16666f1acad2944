
node-0-start-13
node-0node-0:7000"€€€€"€€€€"news(2
user 2item 